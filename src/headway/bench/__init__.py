"""Load for measuring gateways: a paced upstream, a light client, and what processes took of the machine.

For ``headway bench gateway`` and the soak. Everything here is processes on loopback and their counters in ``/proc``; it
refuses to judge: it measures direct, through this gateway and through another one, in one run.
"""
