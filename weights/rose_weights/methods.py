"""The gRPC methods of the weight plane, which stores and relays offer and clients call.

``service`` has the table of what each one does, ``records_service`` that of sandboxes' records.
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
    ForgetRequest,
    MissingReply,
    MissingRequest,
    OpenRequest,
    OwnRequest,
    PartReply,
    PartRequest,
    PlanReply,
    PlanRequest,
    PutReply,
    RecordBlockRequest,
    RecordCommitRequest,
    RecordPutRequest,
    RecordRequest,
    SessionRequest,
    SessionState,
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

RECORDS = "rose.v1.Records"

OWN = Method(RECORDS, "Own", OwnRequest, SessionState)
LOOK = Method(RECORDS, "Look", SessionRequest, SessionState)
READ_RECORD = Method(RECORDS, "Read", RecordRequest, bytes)
READ_BLOCK = Method(RECORDS, "Block", RecordBlockRequest, bytes)
PUT_BLOCK = Method(RECORDS, "Put", RecordPutRequest, bytes)
COMMIT_RECORD = Method(RECORDS, "Commit", RecordCommitRequest, SessionState)
FORGET = Method(RECORDS, "Forget", ForgetRequest, SessionState)
