"""Lets a trainer of TRL take its steps in turns with another program."""

import json
import sys
import time

from transformers import TrainerCallback


class TakingTurns(TrainerCallback):
    """Reports a step, and waits for the next `go`."""

    def on_train_begin(self, *_, **__):
        self.wait()

    def on_step_end(self, *_, **__):
        print(json.dumps({"seconds": time.perf_counter() - self.began}), flush=True)
        self.wait()

    def wait(self):
        sys.stdin.readline()
        self.began = time.perf_counter()
