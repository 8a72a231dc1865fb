{{- define "tidegate.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}
{{- end -}}
{{- end -}}

{{- define "tidegate.selector" -}}
app.kubernetes.io/name: tidegate-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "tidegate.labels" -}}
{{ include "tidegate.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- /* What the operator may do where it watches: the verbs that it uses, no others. */ -}}
{{- define "tidegate.rules" -}}
- apiGroups: [tidegate.dev]
  resources: [llmdeployments]
  verbs: [get, list, watch]
- apiGroups: [tidegate.dev]
  resources: [llmdeployments/status]
  verbs: [patch]
# For blockOwnerDeletion in the children's owner references, where the cluster checks it (OpenShift).
- apiGroups: [tidegate.dev]
  resources: [llmdeployments/finalizers]
  verbs: [update]
# Server-side apply needs create and patch. Nothing is deleted: the garbage collector follows the owner references.
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]
  resources: [services, configmaps, serviceaccounts]
  verbs: [get, list, watch, create, patch]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch]
# Patch: the deletion cost, so that scaling down takes the pod with the least work.
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, patch]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
{{- end -}}
