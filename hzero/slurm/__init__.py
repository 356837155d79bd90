"""Jobs of runs under Slurm: their scripts, the rules of machines, and what becomes of them."""
