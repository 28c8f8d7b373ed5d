"""What would happen: policies and systems on traces, for a model, with nothing bought and nothing trained."""
