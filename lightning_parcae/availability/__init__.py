"""Availability of instances over time: traces, and later forecasts. Pure: no torch, no clock."""
