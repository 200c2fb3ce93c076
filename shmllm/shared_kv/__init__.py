"""The prefix cache that engines of one machine share."""
