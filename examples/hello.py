"""The first program of the README: what a sandbox looks like from inside."""

import getpass
import os
import platform

print(f"Hello from inside: I am {getpass.getuser()} (uid {os.getuid()}), process {os.getpid()}.")
print(f"Python {platform.python_version()}, working in {os.getcwd()}.")
print(f"Host names I can see: {os.listdir('/home') if os.path.isdir('/home') else 'none'}.")
