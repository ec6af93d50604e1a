"""Package in which SGLang looks for models before it imports all of its own."""
