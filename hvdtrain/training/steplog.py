"""Uses of the ranks' agreements on the steps of an epoch: progress bar, step lines, faults."""

import math
import time

import numpy as np

from hvdtrain.errors import CheckFailed
from hvdtrain.health.stragglers import as_lists
from hvdtrain.training import saving
from hvdtrain.training.control import Agreed
from hvdtrain.training.rate import learning_rate
from hvdtrain.training.run import Run

MOST_SKIPPED = 10  # in a row


class StepLog:
    """Reads the agreements on the steps of an epoch, on all ranks at the same step."""

    def __init__(self, run: Run, epoch: int, epoch_length: int) -> None:
        self.run, self.epoch, self.epoch_length = run, epoch, epoch_length
        self.step, self.position = run.progress.step, run.progress.position
        self.last_start = self.position  # of the newest step
        self.window: list[Agreed] = []
        self.window_start = time.perf_counter()

    def add(self, agreed: Agreed) -> int | None:
        """Process one agreement; return the exit code if the ranks agreed to stop.

        Raises:
            CheckFailed: on all ranks at the same step, if it is a bad step and is not skipped.
        """
        run, config = self.run, self.run.session.config
        saving.follow(run, agreed)
        self.step += 1
        self.last_start, self.position = self.position, self.position + agreed.samples
        if agreed.bad or not agreed.finite:
            self._handle_bad(agreed)
        else:
            run.skipped_in_a_row = 0
            run.progress.epoch_loss_sum += agreed.loss_sum
            run.progress.epoch_samples += agreed.samples
        run.console.step(agreed.loss)
        self.window.append(agreed)
        if len(self.window) == config.log_every:
            self.flush()
        return agreed.stop

    def drain(self) -> int | None:
        """Process all pending agreements; return the exit code if the ranks agreed to stop."""
        code = None
        for agreed in self.run.control.drain():
            code = self.add(agreed) or code
        return code

    @property
    def rate(self) -> float:
        """The learning rate of the newest step."""
        return learning_rate(self.run.session.config, self.epoch_length, self.last_start)

    def flush(self) -> None:
        """Write a step line for the steps since the last one, and report stragglers."""
        if not self.window:
            return
        samples = sum(agreed.samples for agreed in self.window)
        good = [agreed for agreed in self.window if agreed.finite and not agreed.bad]
        loss = sum(agreed.loss_sum for agreed in good) / max(1, sum(one.samples for one in good))
        now = self.window[-1].posted_at
        if self.run.records is not None:
            vitals = np.stack([agreed.vitals for agreed in self.window])
            ranks = as_lists(vitals)
            self.run.records.event(
                "step",
                step=self.step,
                epoch=self.epoch + 1,
                position=self.position,
                loss=loss if good else None,
                lr=self.rate,
                images_per_second=samples / (now - self.window_start),
                slowest_rank=int(np.argmax(np.array(ranks["own_seconds"], float))),
                slowest_step_seconds=float(vitals[..., 0].max()),
                ranks=ranks,
            )
            for straggler in self.run.stragglers.look(vitals):
                self.run.report(self.step, "straggler", str(straggler))
        self.window.clear()
        self.window_start = now

    def _handle_bad(self, agreed: Agreed) -> None:
        """Report where a bad step went wrong, and skip it if `--on-bad-step` is skip.

        Raises:
            CheckFailed: if the step is not skipped.
        """
        run, config = self.run, self.run.session.config
        record, limit = run.step_record_at(self.step), config.gradient_limit
        fault = f"the loss became {agreed.loss_sum}"
        if agreed.finite and limit is not None and limit < record.norm < math.inf:
            fault = f"the norm of the gradients was {record.norm:.3g}, above {limit:g},"
        elif agreed.finite:
            fault = "the gradients were not finite"
        where = run.session.diagnose(record)
        message = f"{fault} at step {self.step} (epoch {self.epoch + 1}): {where}"
        run.skipped_in_a_row += 1
        # A step counts as skipped only if all ranks skipped it.
        was_skipped = config.on_bad_step == "skip" and agreed.bad == run.session.world.size
        if was_skipped and run.skipped_in_a_row <= MOST_SKIPPED:
            run.progress.skipped_steps += 1
            run.report(self.step, "bad step", f"{message}; skipped")
            return
        run.record_fault(self.step, "bad step", message)
        row = f"; {MOST_SKIPPED} steps before it were skipped" if was_skipped else ""
        raise CheckFailed(
            f"{message}{row}; try a learning rate below {self.rate:g}, warm-up, or another "
            "precision"
        )
