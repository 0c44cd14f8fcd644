"""What tests of several rooms share: ranks, servers, a warm interpreter, states."""
