"""Other programs' view of vLLM, filled with ours. Opt-in: nothing here runs by itself."""
