"""The first program inside: gives up what root may do, takes the limits, then becomes the program that it was given.

The interpreter gets its source as text, so it must need nothing of mrl. argv[1] is JSON: {"uid": whom to become, or
null; "limits": {name: value}; "ready_fd": a pipe that gets one byte, then the reason should the program not start, and
is closed by its start; "argv": the program}.
"""

import json
import os
import resource
import sys

plan = json.loads(sys.argv[1])
ready_fd, uid = plan["ready_fd"], plan["uid"]
if uid is not None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
os.closerange(3, ready_fd)
os.closerange(ready_fd + 1, os.sysconf("SC_OPEN_MAX"))
os.set_inheritable(ready_fd, False)
for name, value in plan["limits"].items():
    resource.setrlimit(getattr(resource, name), (value, value))
os.write(ready_fd, b"1")
try:
    os.execv(plan["argv"][0], plan["argv"])
except OSError as error:
    os.write(ready_fd, str(error).encode())
