import os
import sys

# Test modules import `harness`, and the ranks it starts import the test modules by name.
sys.path.insert(0, os.path.dirname(__file__))
