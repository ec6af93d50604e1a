"""What must hold between keys, one file for each file of `mrl.config.sections`; `all` puts them in order."""
