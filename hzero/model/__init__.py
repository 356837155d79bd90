"""Performance model: a machine's resources, what collectives cost on them, and a simulator of the step. Needs no torch."""
