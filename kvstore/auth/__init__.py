"""Who a process is, and what it may do: identities, the table of rights, and the files that prove
an identity. Without such a file nothing here is used."""
