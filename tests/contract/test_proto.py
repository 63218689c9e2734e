"""Our messages are the SDK's, field by field."""

import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor
from tinker.proto import tinker_public_pb2 as sdk_pb

from hosted_tinker.wire import tinker_pb2 as pb


def describe_fields(message: Descriptor) -> set[tuple[object, ...]]:
    return {
        (
            field.name,
            field.number,
            field.type,
            field.is_repeated,
            field.containing_oneof.name if field.containing_oneof else None,
            field.message_type.name if field.message_type else None,
        )
        for field in message.fields
    }


@pytest.mark.parametrize("name", sorted(pb.DESCRIPTOR.message_types_by_name))
def test_message_has_the_sdks_fields(name: str) -> None:
    ours, theirs = (module.DESCRIPTOR.message_types_by_name[name] for module in (pb, sdk_pb))
    assert describe_fields(ours) == describe_fields(theirs)


@pytest.mark.parametrize("name", sorted(pb.DESCRIPTOR.enum_types_by_name))
def test_enum_has_the_sdks_values(name: str) -> None:
    def values(enum: EnumDescriptor) -> dict[str, int]:
        return {value.name: value.number for value in enum.values}

    ours, theirs = (module.DESCRIPTOR.enum_types_by_name[name] for module in (pb, sdk_pb))
    assert values(ours) == values(theirs)
