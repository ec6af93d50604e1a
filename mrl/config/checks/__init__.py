"""Rules between keys, one file for each subject of `mrl.config.sections`; `all` calls them in order."""
