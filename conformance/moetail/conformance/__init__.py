"""Does a kernel obey the contract of the MoE tail, and if not, which rule does it break?

This module stays light: pytest imports the plugin beneath it in every run of every project.
"""
