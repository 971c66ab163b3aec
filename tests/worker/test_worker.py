"""A rank that does not come to its work."""

import faulthandler
import socket
import threading

import pytest

from gpubench.channel import ADDRESS_VARIABLE, HOST_GONE
from gpubench.worker import process


@pytest.mark.parametrize("answers", [False, True], ids=["nobody there", "turned away"])
def test_a_rank_without_a_host_says_so_in_a_line_and_leaves_with_a_code_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answers: bool
) -> None:
    for name in ("enable", "register"):  # of the whole process, which is pytest's here
        monkeypatch.setattr(faulthandler, name, lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = f"127.0.0.1:{server.getsockname()[1]}"
        torchrun = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        for name, value in (torchrun | {ADDRESS_VARIABLE: f"tcp:{where}#secret"}).items():
            monkeypatch.setenv(name, value)
        if answers:
            host = threading.Thread(target=turn_away, args=(server,))
            host.start()
        else:
            server.close()
        assert process.main() == HOST_GONE
        if answers:
            host.join()
    error, hint = capsys.readouterr().err.splitlines()
    reasons = (
        f"rank 1 cannot reach rank 0's host at {where}: ",
        f"rank 0's host at {where} refused the connection of rank 1",
    )
    assert error.startswith(f"error: {reasons[answers]}")
    assert hint.startswith("hint: ")


def turn_away(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection:
        connection.makefile().readline()
