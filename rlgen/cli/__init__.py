"""The command line: `app` and `groups` have all commands with their options, the other modules do the work."""
