"""The verbs of the ``headway`` command, one file each; heavy imports stay inside the verb that needs them."""
