"""Runs a Trainer's script, and then prints what hzero has sent for it: ``wire_log.py SCRIPT``."""

import runpy
import sys

import hzero

trainer = runpy.run_path(sys.argv[1], run_name="__main__")["trainer"]
state = hzero.state(trainer.model_wrapped)
if state:
    state.settle()
if trainer.is_world_process_zero():
    for hop in state.wire_log.entries() if state else ():
        print(f"{hop.role} over tier {hop.tier} with {hop.codec}: received {hop.wire_bytes:,} bytes")
    if state is None:
        print("no wire log")
