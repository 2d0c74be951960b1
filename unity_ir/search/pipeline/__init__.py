"""
Choose the stages of a pipeline, and their schedule. Abstract: what a range of layers takes on a part of the machine is
given as a table, and no plan with stages is made yet.

`bound` (least makespan of any order of given stages).
"""
