"""The load room."""
