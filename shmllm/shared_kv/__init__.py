"""The prefix cache in shared memory that engines of one machine share and that outlives them."""
