// The part of ONNX Runtime's C interface that `Session` uses. Its wheel carries the library but no header.
//
// The interface is one table of function pointers that only ever grows at its end (see ONNX Runtime's
// docs/C_API_Guidelines.md), so an entry is known by its place for good. Here are the places and signatures of those
// that are called; `Library` checks the version of what it opened.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "clef_common.hpp"

namespace clef::ort {

// Objects of the library, known by address only.
struct Status;
struct Env;
struct Options;
struct Graph;  // its session
struct Value;
struct MemoryInfo;
struct ShapeInfo;

enum Level : int { warnings = 2 };
enum ElementType : int { float32 = 1, int64 = 7 };
enum Allocator : int { device_allocator = 0 };
enum Memory : int { default_memory = 0 };

// Place → type of what is there. A call that returns a Status returns null where it went well.
template <int place>
struct Entry;
#define CLEF_ORT_ENTRY(name, place, result, ...)  \
    inline constexpr int name = place;            \
    template <>                                   \
    struct Entry<place> {                         \
        using Function = result (*)(__VA_ARGS__); \
    }
CLEF_ORT_ENTRY(GetErrorMessage, 2, const char*, const Status*);
CLEF_ORT_ENTRY(CreateEnv, 3, Status*, Level, const char* name, Env**);
CLEF_ORT_ENTRY(CreateSessionFromArray, 8, Status*, const Env*, const void* model, std::size_t bytes, const Options*,
               Graph**);
CLEF_ORT_ENTRY(Run, 9, Status*, Graph*, const void* options, const char* const* input_names, const Value* const* inputs,
               std::size_t input_count, const char* const* output_names, std::size_t output_count, Value** outputs);
CLEF_ORT_ENTRY(CreateSessionOptions, 10, Status*, Options**);
CLEF_ORT_ENTRY(DisableMemPattern, 17, Status*, Options*);
CLEF_ORT_ENTRY(SetIntraOpNumThreads, 24, Status*, Options*, int);
CLEF_ORT_ENTRY(CreateTensorWithDataAsOrtValue, 49, Status*, const MemoryInfo*, void* data, std::size_t bytes,
               const std::int64_t* shape, std::size_t axes, ElementType, Value**);
CLEF_ORT_ENTRY(CreateCpuMemoryInfo, 69, Status*, Allocator, Memory, MemoryInfo**);
CLEF_ORT_ENTRY(ReleaseEnv, 92, void, Env*);
CLEF_ORT_ENTRY(ReleaseStatus, 93, void, Status*);
CLEF_ORT_ENTRY(ReleaseMemoryInfo, 94, void, MemoryInfo*);
CLEF_ORT_ENTRY(ReleaseSession, 95, void, Graph*);
CLEF_ORT_ENTRY(ReleaseValue, 96, void, Value*);
CLEF_ORT_ENTRY(ReleaseSessionOptions, 100, void, Options*);
CLEF_ORT_ENTRY(AddSessionConfigEntry, 130, Status*, Options*, const char* key, const char* value);
#undef CLEF_ORT_ENTRY

// A table of this version holds every entry above.
inline constexpr std::uint32_t table_version = 5;
// The oldest release that has the operators of the graphs, as pyproject.toml asks for.
inline constexpr int oldest_major = 1, oldest_minor = 31;

// The opened library. It is never unloaded: its threads may outlive every session.
class Library {
public:
    // `path`: as `python -m clef_trt.cpp --onnxruntime` prints it. Throws Error(engine).
    explicit Library(const std::string& path) {
        void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (handle == nullptr) throw Error(Kind::engine, std::string("ONNX Runtime cannot be opened: ") + dlerror());
        struct Base {
            const void* (*table_of_version)(std::uint32_t);
            const char* (*version)();
        };
        auto base_of = reinterpret_cast<const Base* (*)()>(dlsym(handle, "OrtGetApiBase"));
        if (base_of == nullptr) throw Error(Kind::engine, path + " is not ONNX Runtime: it has no OrtGetApiBase");
        const Base* base = base_of();
        version_ = base->version();
        char* rest = nullptr;
        const long major = std::strtol(version_.c_str(), &rest, 10);
        const long minor = *rest == '.' ? std::strtol(rest + 1, nullptr, 10) : 0;
        if (major != oldest_major || minor < oldest_minor)
            throw Error(Kind::engine, path + " is ONNX Runtime " + version_ + "; expected " +
                                          std::to_string(oldest_major) + "." + std::to_string(oldest_minor) +
                                          " or a later release of 1");
        table_ = static_cast<const void* const*>(base->table_of_version(table_version));
        if (table_ == nullptr)
            throw Error(Kind::engine, "ONNX Runtime " + version_ + " does not offer its table of functions");
    }

    const std::string& version() const { return version_; }

    template <int place>
    typename Entry<place>::Function entry() const {
        return reinterpret_cast<typename Entry<place>::Function>(const_cast<void*>(table_[place]));
    }

    // Calls what returns a Status; throws Error(engine) with its message.
    template <int place, typename... Arguments>
    void call(Arguments... arguments) const {
        if (Status* status = entry<place>()(arguments...)) {
            std::string message = entry<GetErrorMessage>()(status);
            entry<ReleaseStatus>()(status);
            throw Error(Kind::engine, "ONNX Runtime: " + message);
        }
    }

private:
    std::string version_;
    const void* const* table_ = nullptr;
};

// An object of the library, released with its owner.
template <typename Object, int release>
class Owned {
public:
    explicit Owned(const Library& library) : library_(&library) {}
    Owned(const Owned&) = delete;
    Owned& operator=(const Owned&) = delete;
    ~Owned() {
        if (object_ != nullptr) library_->entry<release>()(object_);
    }
    Object* get() const { return object_; }
    Object** place() { return &object_; }

private:
    const Library* library_;
    Object* object_ = nullptr;
};

}  // namespace clef::ort
