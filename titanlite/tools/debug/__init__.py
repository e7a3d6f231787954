"""`titanlite debug`: a debugger in one rank of a job, while all other ranks stand still."""
