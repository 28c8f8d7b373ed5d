"""Who is alive: messages, the coordinator and the agent as state machines, and the service around them."""
