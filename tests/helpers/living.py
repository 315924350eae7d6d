"""Processes of servers: which there are, whether they are gone, and where they listen."""

import time

import psutil


def tree(pid: int) -> list[psutil.Process]:
    head = psutil.Process(pid)
    return [head, *head.children(recursive=True)]


def gone(processes: list[psutil.Process], seconds: float) -> bool:
    """Whether all of them are dead within so many seconds; a zombie that nobody waits for is."""
    end = time.monotonic() + seconds

    def lives(process: psutil.Process) -> bool:
        try:
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    while any(map(lives, processes)) and time.monotonic() < end:
        time.sleep(0.1)
    return not any(map(lives, processes))


def listening(processes: list[psutil.Process]) -> list[str]:
    """Addresses that the processes listen on."""
    connections = [connection for process in processes for connection in process.net_connections(kind="inet")]
    return [connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN]
