"""From the trainer to the engines: a push, how its bytes travel, and the proof that they arrived."""
