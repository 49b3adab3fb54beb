"""Asks a prefork server to run a script, and ends when that has ended. Imports little: one lives beside every fork."""

import json
import os
import signal
import socket
import sys


def main() -> None:
    """``prefork_client.py SOCKET SCRIPT ARGUMENT...``"""
    path, *argv = sys.argv[1:]
    request = {
        "argv": argv,
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "group": os.getpgid(0),
        "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
    }
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.connect(path)
    socket.send_fds(server, [json.dumps(request).encode() + b"\n"], [0, 1, 2])
    server.recv(1)  # the fork holds the other end


main()
