"""What sglang finds models in before it imports all that it has."""
