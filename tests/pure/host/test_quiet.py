"""Known remarks of libraries are dropped, and nothing else."""

import os

import pytest

from hvdtrain.host import output


def test_known_remarks_are_left_out_whoever_writes_them(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with output.without(["of no use"]):
        os.write(2, b"a remark of no use\nfrom below\n")
    os.write(2, b"behind it\n")
    assert capfd.readouterr().err == "from below\nbehind it\n"


def test_what_was_written_before_an_error_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="wrong"), output.without(["of no use"]):
        os.write(2, b"the cause\n")
        raise ValueError("wrong")
    assert capfd.readouterr().err == "the cause\n"
