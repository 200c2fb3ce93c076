"""Both ends of the ways by which a trainer's weights reach an engine.

Each backend is one module with the class `Receiver`, which the engine uses, and the class `Sender`,
which the trainer uses; `config.weight_transfer` lists the modules. This package must not know how
calls reach an engine, nor how an engine keeps weights.
"""
