"""The sections of a configuration, one file per subject."""
