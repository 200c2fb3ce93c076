"""What happened when, in all processes: recorded as it happens, put together afterwards.

Owns recordings (one file of fixed-size records a process), the directory they lie in, and
the timeline made of them. Imports nothing of ours: what records mean is said by the names
in `layout`, and the code that records stands beside what it records, in `engine.tracing`
and `frontend.tracing`.
"""
