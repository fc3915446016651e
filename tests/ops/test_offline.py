"""What the compiler makes of the kernels for a GPU, on a machine without one."""

from .cases import KERNELS
from .offline import OTHER_ROWS, chosen_cases, describe, launches_of

WIDTHS = [2304, 12288, 32768]  # of every kind of tile


def test_what_every_launch_of_the_cases_is_compiled_to():
    """One test, as it looks at one run of the program."""
    launches = launches_of("offline", "--json", "--width", *map(str, WIDTHS))

    # Both directions compile, also looped and cooperative ones.
    assert [launch for launch in launches if "error" in launch] == []
    found = {(launch["case"], launch["kernel"]) for launch in launches}
    assert {(describe(case), kernel) for case in chosen_cases(False, WIDTHS) for kernel in KERNELS[:2]} <= found
    assert any(launch["tile"] and launch["tile"]["looped"] for launch in launches)
    assert any(launch["cooperative"] for launch in launches)

    # A new number of rows or dropout probability compiles nothing. Trap: Triton specialises an integer that is 1 or a multiple
    # of 16, in a tuple even if it is told not to.
    for kernel in KERNELS:
        alike = [launch for launch in launches if launch["kernel"] == kernel and launch["case"] in map(describe, OTHER_ROWS)]
        assert len(alike) == len(OTHER_ROWS) and len({launch["compilation"] for launch in alike}) == 1, kernel

    # Every program fits a multiprocessor, with those that wait for it, and hardly spills. Trap: too many registers for so many
    # threads, which the driver refuses when the kernel starts.
    for launch in launches:
        assert launch["resident"] >= (launch["tile"]["programs_per_sm"] if launch["cooperative"] else 1), launch
        assert launch["spilled"] <= 64, launch

    # What starts early touches no memory before it has waited.
    assert {launch["starts_early"] for launch in launches} == {True, False}
    for launch in launches:
        assert launch["before_waiting"] == ([] if launch["starts_early"] else None), launch
