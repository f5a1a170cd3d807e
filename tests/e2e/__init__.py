"""A package, so that its fixtures end with its last test: an idle Ray takes a third of a core."""
