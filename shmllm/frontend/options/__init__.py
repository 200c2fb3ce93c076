"""The options that users give, ours and vLLM's, and what they say of a front end and an engine."""
