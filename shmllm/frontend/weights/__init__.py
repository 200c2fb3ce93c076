"""The weights of a running engine: new ones from a trainer, and which of them made a token."""
