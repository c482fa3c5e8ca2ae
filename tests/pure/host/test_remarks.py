from hvdtrain.host.output import without_launcher_banners

FRAME = "-" * 74 + "\n"
KILLED = """\
prterun noticed that process rank 1 with PID 3866 on node vm exited on
signal 9 (Killed).
""".splitlines(keepends=True)


def test_what_mpirun_says_in_frames_is_kept_apart_from_what_ranks_say() -> None:
    lines = [
        "hvdtrain: a word of a rank\n",
        FRAME,
        *KILLED,
        FRAME,
        "\0[vm:03843] PMIX ERROR: PMIX_ERR_UNREACH in file x.c at line 3146\n",
        "[warn] Epoll MOD(1) on fd 21 failed. Old events were 6; read change was 0 (none); write "
        "change was 2 (del); close change was 0 (none): Bad file descriptor\n",
        "after\n",
    ]
    banners: list[str] = []
    passed = list(without_launcher_banners(lines, banners))
    assert passed == ["hvdtrain: a word of a rank\n", "after\n"]
    assert banners == [line.rstrip() for line in KILLED]


def test_a_remark_inside_a_line_is_removed() -> None:
    banners: list[str] = []
    lines = ["not yet ended" + FRAME, *KILLED, FRAME, "after\n"]
    assert list(without_launcher_banners(lines, banners)) == ["not yet ended\n", "after\n"]
    assert banners == [line.rstrip() for line in KILLED]


def test_a_table_in_dashes_is_no_remark() -> None:
    table = [FRAME, "a | b\n", FRAME, "Traceback (most recent call last):\n", FRAME, "1 | 2\n"]
    banners: list[str] = []
    assert list(without_launcher_banners(table, banners)) == table
    assert banners == []
