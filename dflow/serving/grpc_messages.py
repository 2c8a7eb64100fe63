"""The messages of the Open Inference Protocol over gRPC: package `inference`, service `GRPCInferenceService`.

The classes are made when this module is imported, in a pool of their own: generated code would be bound to versions of
protobuf, and a client in this process may register the same names in the default pool. A field's number is its
position.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

SERVICE = "inference.GRPCInferenceService"

#: Fields by message. `map X` is a map from strings to `X`; a name with a colon is of the oneof that the fields are in.
_FIELDS = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "bool live",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "bool ready",
    "ModelReadyRequest": "string name, string version",
    "ModelReadyResponse": "bool ready",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "string name, string version, repeated string extensions",
    "ModelMetadataRequest": "string name, string version",
    "ModelMetadataResponse": "string name, repeated string versions, string platform, repeated TensorMetadata inputs, "
    "repeated TensorMetadata outputs",
    "ModelMetadataResponse.TensorMetadata": "string name, string datatype, repeated int64 shape",
    "InferParameter": "parameter_choice: bool bool_param, int64 int64_param, string string_param, double double_param, "
    "uint64 uint64_param",
    "InferTensorContents": "repeated bool bool_contents, repeated int32 int_contents, repeated int64 int64_contents, "
    "repeated uint32 uint_contents, repeated uint64 uint64_contents, repeated float fp32_contents, "
    "repeated double fp64_contents, repeated bytes bytes_contents",
    "ModelInferRequest": "string model_name, string model_version, string id, map InferParameter parameters, "
    "repeated InferInputTensor inputs, repeated InferRequestedOutputTensor outputs, repeated bytes raw_input_contents",
    "ModelInferRequest.InferInputTensor": "string name, string datatype, repeated int64 shape, "
    "map InferParameter parameters, InferTensorContents contents",
    "ModelInferRequest.InferRequestedOutputTensor": "string name, map InferParameter parameters",
    "ModelInferResponse": "string model_name, string model_version, string id, map InferParameter parameters, "
    "repeated InferOutputTensor outputs, repeated bytes raw_output_contents",
    "ModelInferResponse.InferOutputTensor": "string name, string datatype, repeated int64 shape, "
    "map InferParameter parameters, InferTensorContents contents",
    "RepositoryIndexRequest": "string repository_name, bool ready",
    "RepositoryIndexResponse": "repeated ModelIndex models",
    "RepositoryIndexResponse.ModelIndex": "string name, string version, string state, string reason",
    "ModelRepositoryParameter": "parameter_choice: bool bool_param, int64 int64_param, string string_param, "
    "bytes bytes_param",
    "RepositoryModelLoadRequest": "string repository_name, string model_name, map ModelRepositoryParameter parameters",
    "RepositoryModelLoadResponse": "",
}


#: Kinds of fields that are no messages.
_SCALARS = ("bool", "bytes", "double", "float", "int32", "int64", "string", "uint32", "uint64")


def _add_field(message: Any, name: str, kind: str, number: int, **options: Any) -> None:
    label, _, kind = kind.rpartition(" ")
    if label == "map":  # protobuf has a map as a list of messages
        entry = message.nested_type.add(name=f"{name.title()}Entry")
        entry.options.map_entry = True
        _add_field(entry, "key", "string", 1)
        _add_field(entry, "value", kind, 2)
        kind = entry.name
    field = descriptor_pb2.FieldDescriptorProto
    typed = {"type": field.Type.Value(f"TYPE_{kind.upper()}")} if kind in _SCALARS else {"type_name": kind}
    repeats = field.LABEL_REPEATED if label else field.LABEL_OPTIONAL
    message.field.add(name=name, number=number, label=repeats, **typed, **options)


def _add_message(file: Any, path: str, fields: str) -> None:
    outer, _, name = path.rpartition(".")
    parent = next((one.nested_type for one in file.message_type if one.name == outer), file.message_type)
    message = parent.add(name=name)
    oneof, _, members = fields.rpartition(": ")
    if oneof:
        message.oneof_decl.add(name=oneof)
    for number, member in enumerate(filter(None, members.split(", ")), 1):
        kind, _, field_name = member.rpartition(" ")
        _add_field(message, field_name, kind, number, **({"oneof_index": 0} if oneof else {}))


def _classes() -> dict[str, Any]:
    """Return the class of each message by its name."""
    package = SERVICE.rpartition(".")[0]
    file = descriptor_pb2.FileDescriptorProto(name="open_inference.proto", package=package, syntax="proto3")
    for path, fields in _FIELDS.items():
        _add_message(file, path, fields)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    names = [message.name for message in file.message_type]
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}")) for name in names}


#: The class of each message by its name.
MESSAGES = _classes()
#: The methods of the service, each with a request and a response.
METHODS = [name.removesuffix("Request") for name in MESSAGES if name.endswith("Request")]
