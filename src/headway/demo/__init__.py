"""The demo: three unlike simulated engines and a gateway as processes, one workload, several policies, one table.

It exists so that a stranger sees in minutes what routing in time buys, and so that a developer can measure a change
end to end over real sockets. It refuses to help any policy: the truth about answers (``truth``) reaches the engines and
the score, never the router, and it is the same for every policy under test.
"""
