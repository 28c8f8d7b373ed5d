"""What to run: configurations, layouts, migration plans, the layout policy. Pure: no torch, no clock."""
