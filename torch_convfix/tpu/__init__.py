"""A TPU that is not there: trace a step on either TPU stack, and run or compile what was traced."""
