"""The elastic pipeline: process groups, channels, stages, and the movement of their state."""
