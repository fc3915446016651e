"""A rank as benchmarks.scaling starts it, the last of which is killed in its first turn."""

import os
import signal

from benchmarks import scaling_ranks

if __name__ == "__main__":
    measure = scaling_ranks.measure

    def dies(*arguments):
        if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return measure(*arguments)

    scaling_ranks.measure = dies
    scaling_ranks.main()
