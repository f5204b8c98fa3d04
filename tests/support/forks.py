"""Processes forked from one that has imported fluctua, which takes a second each time."""

import atexit
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading

PARENT = """
import json, os, socket, sys, traceback
import h5py, numpy
import fluctua.insitu.files


def run(code, arguments, streams):
    status = 1
    try:
        requests.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")
        sys.argv = ["-c", *arguments]
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


requests = socket.socket(fileno=int(sys.argv[1]))
while True:
    message, streams, _, _ = socket.recv_fds(requests, 2**16, 3)
    while message and not message.endswith(b"\\n"):
        message += requests.recv(2**16)
    if not message:
        break
    request = json.loads(message)
    if "wait" in request:
        answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
    else:
        answer = os.fork()
        if not answer:
            run(request["code"], request["arguments"], streams)
        for stream in streams:
            os.close(stream)
    requests.sendall(json.dumps(answer).encode())
"""


@functools.cache
def start_parent():
    """Start the process that forks. Returns the socket that takes its requests."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", PARENT, str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    theirs.close()

    @atexit.register
    def stop():
        ours.close()
        process.wait()

    return ours


def ask_parent(request, streams=()):
    parent = start_parent()
    socket.send_fds(parent, [json.dumps(request).encode() + b"\n"], streams)
    return json.loads(parent.recv(100))


class Fork:
    """A forked process, with the streams and methods of `subprocess.Popen` that tests use.

    It ends by `os._exit`: what Python does at its exit is not done.
    """

    def __init__(self, code, arguments):
        their_input, stdin = os.pipe()
        stdout, their_output = os.pipe()
        stderr, their_errors = os.pipe()
        streams = [their_input, their_output, their_errors]
        self.pid = ask_parent({"code": code, "arguments": arguments}, streams)
        for stream in streams:
            os.close(stream)
        self.stdin = os.fdopen(stdin, "w")
        self.stdout = os.fdopen(stdout)
        self.stderr = os.fdopen(stderr)
        self.returncode = None

    def wait(self):
        if self.returncode is None:
            self.returncode = ask_parent({"wait": self.pid})
        return self.returncode

    def kill(self):
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def communicate(self, text="", timeout=300.0):
        """Write a text and close the input; return what is printed, and the errors.

        Both must fit into the buffer of a pipe. Raises `subprocess.TimeoutExpired`.
        """
        late = threading.Event()

        def stop():
            late.set()
            self.kill()

        deadline = threading.Timer(timeout, stop)
        deadline.start()
        try:
            with self.stdin, self.stdout, self.stderr:
                self.stdin.write(text)
                self.stdin.close()
                printed = self.stdout.read(), self.stderr.read()
                self.wait()
        finally:
            deadline.cancel()
        if late.is_set():
            raise subprocess.TimeoutExpired("python -c", timeout)
        return printed


def start_python(code, *arguments):
    """Run `python -c code arguments…` in a process of its own, as `subprocess.Popen` would."""
    code = textwrap.dedent(code)
    words = [str(argument) for argument in arguments]
    if hasattr(os, "fork"):
        return Fork(code, words)
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([sys.executable, "-c", code, *words], text=True, **pipes)
