"""The version of titanlite, from which that of the installed package is made."""

VERSION = "0.1.0"
