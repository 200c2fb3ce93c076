"""The modules of tools/simulate_pool.py: engines and loads in simulated time. Not installed."""
