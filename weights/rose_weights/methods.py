"""The gRPC methods of the weight plane, which stores and relays offer and clients call.

``service`` has the table of what each one does.
"""

from __future__ import annotations

from rose_weights.messages import (
    AttestedReply,
    AttestedRequest,
    AwaitReply,
    AwaitRequest,
    CommitRequest,
    DescribeRequest,
    Description,
    FetchRequest,
    MissingReply,
    MissingRequest,
    OpenRequest,
    PartReply,
    PartRequest,
    PlanReply,
    PlanRequest,
    PutReply,
    VersionInfo,
    WatchRequest,
)
from rose_wire.rpc import Method

SERVICE = "rose.v1.Weights"

DESCRIBE = Method(SERVICE, "Describe", DescribeRequest, Description)
WATCH = Method(SERVICE, "Watch", WatchRequest, VersionInfo)
PLAN = Method(SERVICE, "Plan", PlanRequest, PlanReply)
FETCH = Method(SERVICE, "Fetch", FetchRequest, bytes)
OPEN = Method(SERVICE, "Open", OpenRequest, Description)
MISSING = Method(SERVICE, "Missing", MissingRequest, MissingReply)
PUT = Method(SERVICE, "Put", bytes, PutReply)
COMMIT = Method(SERVICE, "Commit", CommitRequest, VersionInfo)
PART = Method(SERVICE, "Part", PartRequest, PartReply)
ATTESTED = Method(SERVICE, "Attested", AttestedRequest, AttestedReply)
AWAIT = Method(SERVICE, "Await", AwaitRequest, AwaitReply)
