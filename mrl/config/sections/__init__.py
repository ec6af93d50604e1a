"""The sections of a configuration, a file a subject."""
