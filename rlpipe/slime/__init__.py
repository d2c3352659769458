"""slime's command line, `args` and importable modules on top of rlpipe's configuration."""
