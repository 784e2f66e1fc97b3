# Each target sets up what it needs, so that `make demo` or `make test` is the first command in a fresh clone.
# PYTHON=/path/to/python3.12 names the interpreter; ARGS="..." is passed on (make test ARGS="tests/test_doctor.py -k json").

.PHONY: help setup demo test test-gpu

help:
	@echo "make setup   .venv with everything that the CPU needs, from requirements/cpu.txt"
	@echo "make demo    glm5next bringup: checkpoint in, RL steps in Megatron, checkpoint out, a report"
	@echo "make test    all tests that need no GPU"
	@echo "make test-gpu  the tests that need one; PYTHON is an interpreter that has the frameworks"

setup:
	@bash requirements/setup.sh

demo: setup
	.venv/bin/glm5next bringup $(ARGS)

test: setup
	.venv/bin/python -m pytest $(ARGS)

test-gpu:
	@bash tests/gpu/run.sh $(ARGS)
